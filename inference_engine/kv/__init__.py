"""What a session keeps: geometry, the pool and its slabs, strategies, and the plan of one forward."""
