"""`make demo`: a teacher on scikit-learn's digits, converted to eight linear attentions and distilled, with a report,
and a photograph of up to 1,024 pixels, timed. A few minutes on two cores; everything lands in demo/."""
