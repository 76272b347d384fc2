"""Assembly, version 1: pure functions. A batch records the version that made it; replay runs that one, for ever."""
