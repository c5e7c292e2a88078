"""What leaves this machine: bundles for servers without a network, service files, archives for support."""
