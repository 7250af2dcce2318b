"""An open-loop load: what agents would ask of a server, when, and how the answers came."""
