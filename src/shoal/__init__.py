"""Shoal turns the GPUs of many machines into one PyTorch device."""
