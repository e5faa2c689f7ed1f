"""What runs a bundle: one file per engine, imported when it is chosen (`protocols.py` says what each must offer)."""
