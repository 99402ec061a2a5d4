"""Memory that programs share: who has which, and the server of its descriptors."""
