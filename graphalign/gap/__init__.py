"""The gap between inference and training: statistics, checks of the input, attribution to groups. Needs numpy only."""
