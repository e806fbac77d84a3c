"""The layers whose per-example gradients the engine knows in closed form."""
