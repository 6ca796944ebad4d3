"""One file per thing that kvarn is compared with; each says in words why it is missing, if so."""
