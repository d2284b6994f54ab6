"""How the ranks' forwards and backwards become sweeps, and how one rank runs its tasks of them."""
