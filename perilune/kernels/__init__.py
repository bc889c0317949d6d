"""Arithmetic on the CPU behind one interface: native C11 where it was built, else PyTorch; `select` chooses."""
