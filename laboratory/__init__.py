"""What is measured and trained on the runtime. It stands above it: nothing that serves imports it."""
