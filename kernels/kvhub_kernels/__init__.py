"""Kernels that apply mappers, each beside its plain-torch reference."""
