"""One module per engine, each with `load(spec) -> BenchEngine`; imported only inside that engine's environment."""
