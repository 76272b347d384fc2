"""Harbor-style task directories: read, checked, written, and packed into the event that publishes them."""
