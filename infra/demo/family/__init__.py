"""The demo's task family: small Python packages with one injected bug, visible and hidden tests."""
