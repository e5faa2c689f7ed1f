"""Measuring a bundle: prompt sets, one run of all modes, figures and how they are written down."""
