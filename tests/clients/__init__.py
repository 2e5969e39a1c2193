"""Programs for agents, each as its users write them; `make clients` installs what they import."""
