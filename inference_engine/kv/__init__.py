"""What a session keeps: geometry, the pool and its allocations, strategies, and the plan of one forward."""
