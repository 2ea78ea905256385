"""The control plane: Python and numpy. It decides; it never touches a tensor (a test keeps torch out of here)."""
