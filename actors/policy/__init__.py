"""Policy: model, tokenizer, chat template and tool-call format."""
