"""SGLang extension: serve a switched conversation from the other model's cache."""
