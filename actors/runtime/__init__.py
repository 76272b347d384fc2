"""What every Ray actor shares: its own event loop, its settings, and how actors find each other."""
