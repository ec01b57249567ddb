"""Fitting: calibration text, captures, moments, layer selection, ridge (arXiv 2608.03893, sections 2-3)."""
