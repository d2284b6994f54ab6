"""The best plan for a model on a server, plans as files, and which engine suits them."""
