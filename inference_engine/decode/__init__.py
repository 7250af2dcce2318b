"""From sessions to tokens: the packed batch, the verifier that runs it, the sampling of its logits."""
