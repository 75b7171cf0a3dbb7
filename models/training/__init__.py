"""Training of the encoders. One recipe is one TOML file; `care train RECIPE` runs it and writes an encoder folder."""
