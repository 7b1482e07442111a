"""What only some recipes need: the moving average, MESA, Castling's masks, drop path, BatchNorm, image sizes."""
