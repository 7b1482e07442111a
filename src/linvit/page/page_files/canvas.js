// Maps drawn over the picture. Dark is little, bright is much; what a mechanism subtracts is blue.
const WARM = [[0, 0, 4], [40, 11, 84], [101, 21, 110], [159, 42, 99], [212, 72, 66], [245, 125, 21], [250, 193, 39], [252, 255, 164]];
const COLD = [[0, 0, 4], [8, 40, 90], [16, 84, 150], [40, 130, 200], [110, 180, 235], [200, 230, 255]];

function colour(ramp, share) {
  const at = Math.min(share, 0.9999) * (ramp.length - 1);
  const low = Math.floor(at);
  return ramp[low].map((value, i) => value + (at - low) * (ramp[low + 1][i] - value));
}

// Numbers on a grid as a small picture, a pixel a patch; the largest size is brightest.
export function heat(values, height, width) {
  const most = values.reduce((best, x) => Math.max(best, Math.abs(x)), 1e-30);
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  values.forEach((x, i) => {
    const share = Math.abs(x) / most;
    const [r, g, b] = colour(x < 0 ? COLD : WARM, share);
    image.data.set([r, g, b, 255 * (0.55 + 0.27 * share)], 4 * i);
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

export function rgb(bytes, height, width) {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let i = 0; i < height * width; i += 1) image.data.set([bytes[3 * i], bytes[3 * i + 1], bytes[3 * i + 2], 255], 4 * i);
  context.putImageData(image, 0, 0);
  return canvas;
}

// The picture, the map over it, and a frame around the patch that asks.
export function draw(canvas, picture, map, frame) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  context.imageSmoothingEnabled = true;
  context.clearRect(0, 0, width, height);
  if (picture) context.drawImage(picture, 0, 0, width, height);
  if (map) {
    context.imageSmoothingEnabled = false;
    context.drawImage(map, 0, 0, width, height);
  }
  if (frame) {
    const [x, y, w, h] = [frame.x * width, frame.y * height, frame.width * width, frame.height * height];
    const line = Math.max(2, width / 200);
    context.lineWidth = 2 * line;
    context.strokeStyle = "#000";
    context.strokeRect(x, y, w, h);
    context.lineWidth = line;
    context.strokeStyle = "#fff";
    context.strokeRect(x, y, w, h);
  }
}
