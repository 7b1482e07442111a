"""A Fair Comparison between Efficient Attentions (Hong et al., 2022): the poster's table."""

from linvit.measurement.published.table import Printed, Table, section

NO_SCORES = "The cell leaves out the score vectors w_q and w_k."
FROZEN = "The random projections are frozen and count neither here nor there."
LOCAL = "Plain local windows as in the released code; the poster says shifted."
PLAIN_XCA = "Without norm and temperature as in the released code; the poster prints both."
COPIED = "The cell is COL-16's; smaller patches make a smaller embedding."


def pyramid(patch: int, *cells: tuple[str, str, str, str, str, str]) -> tuple[Printed, ...]:
    """Rows of (label, name, parameters, FLOPs, top-1, note)."""
    rows = []
    for label, name, params, flops, top1, note in cells:
        model, left_out = f"fair_pyramid_p{patch}_{name}", "mechanisms" if note == NO_SCORES else ""
        rows.append(Printed(f"{label}-{patch}", model, params, flops, top1, note, left_out=left_out))
    return tuple(rows)


TABLE = Table(
    "Fair Comparison between Efficient Attentions",
    "FLOPs as fvcore counts them: MACs, and 5 for every normalised element.",
    (
        section(
            "Patches of 4 pixels",
            *pyramid(
                4,
                ("SA", "sa", "28.27", "8.821", "81.80", ""),
                ("LA", "la", "30.91", "5.496", "79.04", ""),
                ("EA", "ea", "28.27", "4.480", "79.87", ""),
                ("PA", "pa", "28.27", "4.481", "78.73", FROZEN),
                ("AA", "aa", "28.27", "4.394", "77.60", NO_SCORES),
                ("XCA", "xca", "28.27", "4.480", "78.67", PLAIN_XCA),
                ("Swin", "window", "28.27", "4.528", "80.08", LOCAL),
                ("LPI", "lpi", "28.38", "4.520", "81.54", ""),
            ),
        ),
        section(
            "Patches of 7 pixels",
            *pyramid(
                7,
                ("SA", "sa", "28.28", "1.915", "78.97", ""),
                ("LA", "la", "28.56", "1.561", "77.47", ""),
                ("EA", "ea", "28.28", "1.473", "77.91", ""),
                ("PA", "pa", "28.28", "1.473", "77.87", FROZEN),
                ("AA", "aa", "28.28", "1.445", "76.02", NO_SCORES),
                ("XCA", "xca", "28.28", "1.473", "77.62", PLAIN_XCA),
                ("Swin", "window", "28.28", "1.500", "78.72", LOCAL),
                ("LPI", "lpi", "28.39", "1.486", "79.70", ""),
            ),
        ),
        section(
            "Column",
            Printed("COL-14", "fair_column_p14", "22.00", "6.117", "81.30", COPIED, ("params",)),
            Printed("COL-16", "fair_column_p16", "22.00", "4.589", "80.97"),
        ),
    ),
    convention="fvcore",
    tolerance=0.0005,
)
