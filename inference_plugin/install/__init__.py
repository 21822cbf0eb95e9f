"""How staged weights get into a live model: placement plans, their proof, installation and verification."""
