"""EAGLE-3 drafters: one layer that drafts token after token from the target's hidden states and its own."""
