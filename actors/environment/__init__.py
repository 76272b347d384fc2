"""Environment room: the sandbox protocol (`protocol.py`), its drivers (`ns/`) and the workspace delta (`delta.py`)."""
