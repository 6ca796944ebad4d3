"""How figures look."""

# Okabe and Ito's colours, which the colour-blind tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COMPARATOR_COLOR = "#999999"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "figure.dpi": 150,
    "savefig.bbox": "tight",
    "savefig.facecolor": "white",
    "legend.frameon": False,
}
