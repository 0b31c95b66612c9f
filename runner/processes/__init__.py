"""Starting a process and its children, and finding all of them again in order to end them."""
