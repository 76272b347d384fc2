"""Starting, finding and ending a deployment's actors on Ray."""
