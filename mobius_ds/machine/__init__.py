"""What this machine is and lacks: its topology, its memory, and the doctor that judges them."""
