"""Who runs when: the request's states, the choice of each step, the loop that owns the device."""
