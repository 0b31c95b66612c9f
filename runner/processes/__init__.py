"""Starting a process and its children, and finding all of them again to end them."""
