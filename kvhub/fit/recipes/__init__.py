"""Closed-form ways to fit the tensors of a mapper beside plain ridge; each serves as ridge does."""
