"""What each call of a traced program does to memory, and the hazards that follow: Program → OpGraph."""
