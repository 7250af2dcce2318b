"""The `kakeya` command: serve, chat, demo, doctor, models. The top layer, and the only one that imports the SDK."""
