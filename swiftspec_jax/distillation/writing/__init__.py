"""The target writes the text that a draft is trained on."""
