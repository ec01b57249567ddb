"""Mappers on the Hugging Face Hub: push, pull, the card, and what can go wrong."""
