"""Models on the Hugging Face hub: fetched by their names, pushed with a model card."""
