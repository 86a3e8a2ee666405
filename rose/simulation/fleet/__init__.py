"""Everything around the engines: nodes, scheduler, gateway, weights, trainer and users."""
