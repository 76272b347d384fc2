"""The single controller: admission, placement, sealing of groups, the fold of weights.v1. A pure core, a thin shell."""
