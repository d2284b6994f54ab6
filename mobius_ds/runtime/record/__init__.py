"""When tasks ran: noted while they run, written as a trace, and read back."""
