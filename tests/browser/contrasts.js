// Paints are mixed as the browser does: from the text's centre downwards through everything that is drawn there, SVG
// shapes among them, until something is opaque. The canvas turns any notation of a colour into numbers.
root => {
    const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1})
    const pen = canvas.getContext('2d', {willReadFrequently: true})
    const paint = colour => {
        pen.clearRect(0, 0, 1, 1)
        pen.fillStyle = colour
        pen.fillRect(0, 0, 1, 1)
        const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data
        return [r, g, b, a / 255]
    }
    const faded = (element, [r, g, b, a]) => {
        for (let up = element; up; up = up.parentElement) a *= +getComputedStyle(up).opacity
        return [r, g, b, a]
    }
    const over = ([r, g, b, a], under) => [r, g, b].map((part, i) => part * a + under[i] * (1 - a))
    const own = element => {
        const style = getComputedStyle(element)
        if (!(element instanceof SVGElement) || element instanceof SVGSVGElement) return paint(style.backgroundColor)
        if (!(element instanceof SVGGeometryElement) || style.fill === 'none') return [0, 0, 0, 0]
        const [r, g, b, a] = paint(style.fill)
        return [r, g, b, a * +style.fillOpacity]
    }
    const paper = (element, x, y) => {
        const layers = []
        for (const below of document.elementsFromPoint(x, y)) {
            if (below === element || below.tagName === 'text' || below.tagName === 'tspan') continue
            layers.push(faded(below, own(below)))
            if (layers.at(-1)[3] > 0.999) break
        }
        return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255])
    }
    const luminance = parts => {
        const [r, g, b] = parts.map(p => p / 255).map(p => p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b
    }
    const found = []
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT)
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const element = node.parentElement, text = node.textContent.trim()
        if (!text || element.closest('style, script, title, option, [disabled]')) continue
        const range = document.createRange()
        range.selectNodeContents(node)
        const box = range.getClientRects()[0]
        if (!box || box.width < 2 || box.height < 2 || !element.checkVisibility()) continue
        const [x, y] = [box.left + box.width / 2, box.top + box.height / 2]
        if (x < 0 || y < 0 || x >= innerWidth || y >= innerHeight) continue
        const style = getComputedStyle(element), under = paper(element, x, y)
        const ink = paint(element instanceof SVGElement ? style.fill : style.color)
        const [light, dark] = [luminance(over(faded(element, ink), under)), luminance(under)].sort((a, b) => b - a)
        const drawing = [...document.querySelectorAll('svg')].indexOf(element.closest('svg'))
        found.push({text: text.slice(0, 40), contrast: (light + 0.05) / (dark + 0.05), box: box.toJSON(), drawing})
    }
    return found
}
