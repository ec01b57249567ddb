"""Starting an SGLang server with kvhub in it; imports nothing of SGLang."""
