"""Studies: both models on fixed windows are kept on disk; a recipe is then a re-solve and short tails."""
