"""What a release is checked with: see CONTRIBUTING.md."""
