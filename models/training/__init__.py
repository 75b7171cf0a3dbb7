"""Training of encoders: `care train RECIPE` runs a recipe (one TOML file) and writes encoder folders."""
