"""Metrics in Prometheus form: what there is (catalogue), what holds the values (registry), who serves them (server)."""
