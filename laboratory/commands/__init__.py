"""The commands of `kakeya` that the laboratory brings: one file a command, loaded when it is typed."""
